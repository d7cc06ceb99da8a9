import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "examples" / "torch_stuck.py"


def test_a_file_where_the_run_files_should_go_is_refused_by_name(tmp_path):
    (tmp_path / "runs").touch()
    command = [sys.executable, SCRIPT, "--runs", "runs"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 2
    assert "--runs: cannot make the folder runs: File exists" in result.stderr
