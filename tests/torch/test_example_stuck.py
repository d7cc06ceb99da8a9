from pathlib import Path

from tests.support import programs

SCRIPT = Path(__file__).parents[2] / "examples" / "torch_stuck.py"


def test_a_file_where_the_run_files_should_go_is_refused_by_name(tmp_path):
    (tmp_path / "runs").touch()
    result = programs.run(SCRIPT, "--runs", "runs", cwd=tmp_path)
    assert result.returncode == 2
    assert "--runs: cannot make the folder runs: File exists" in result.stderr
