"""``python -m gradscaler convert``, on good files and on bad ones."""

import codecs
import contextlib
import io
import itertools
import json
import math
import pickle
import sys
import tracemalloc
import zipfile

import numpy as np
import pytest
import torch

from gradscaler import DynamicScale
from gradscaler.__main__ import main
from gradscaler.checkpoint import FORMATS, _files, read, write
from gradscaler.torch import GradScaler


def scales_of(scaler, gradients):
    """The scale after a step with each of the gradients."""
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight])
    for value in gradients:
        weight.grad = None
        scaler.scale((weight * value).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        yield scaler.get_scale()


@pytest.fixture
def saved(tmp_path):
    """The file that torch saves of a scaler whose scale has moved."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=50)
    assert list(scales_of(scaler, (1.0, math.inf, 1.0))) == [1024.0, 512.0, 512.0]
    path = tmp_path / "scaler.pt"
    torch.save(scaler.state_dict(), path)
    return path


def convert(source, target, to, *options):
    return main(["convert", str(source), str(target), "--to", to, *options])


def test_from_torch_s_file_to_paddle_s_to_json_and_back(saved, tmp_path, capsys):
    chain = [(saved, "torch"), (tmp_path / "b.pdparams", "paddle"), (tmp_path / "c.json", "flax")]
    chain.append((tmp_path / "d.pt", "torch"))
    for (source, _), (target, to) in itertools.pairwise(chain):
        assert convert(source, target, to) == 0
    steps = (
        f"{source}: {was}'s format -> {target}, {to}'s format\n"
        for (source, was), (target, to) in itertools.pairwise(chain)
    )
    assert capsys.readouterr() == ("", "".join(steps))
    loaded = torch.load(tmp_path / "d.pt", weights_only=True)
    assert loaded == torch.load(saved, weights_only=True)
    assert loaded["scale"] == 512
    scaler = torch.amp.GradScaler("cpu")
    scaler.load_state_dict(loaded)
    assert scaler.get_scale() == 512
    assert json.loads((tmp_path / "c.json").read_text())["fin_steps"] == 1
    with (tmp_path / "b.pdparams").open("rb") as file:
        assert pickle.load(file)["scale"].dtype == np.float32


def test_a_file_may_be_converted_in_place(saved):
    before = torch.load(saved, weights_only=True)
    assert convert(saved, saved, "tensorplay") == 0
    assert torch.load(saved, weights_only=True) == before


@pytest.mark.parametrize("target", FORMATS)
@pytest.mark.parametrize("source", FORMATS)
def test_between_default_rules_every_format_converts_to_every_other(
    source, target, tmp_path, capsys
):
    policy = getattr(DynamicScale, source.removeprefix("tf_"))()
    _files.save(tmp_path / "a.json", write(policy, policy.init(), source))
    assert convert(tmp_path / "a.json", tmp_path / "b.json", target) == 0
    assert capsys.readouterr().err.count("\n") == 1
    assert read(_files.load(tmp_path / "b.json").values)[1] == policy.init()


@pytest.mark.parametrize("suffix", [".json", ".pt", ".pdparams"])
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_can_be_read_back_from_every_kind_of_file(name, suffix, tmp_path):
    policy = getattr(DynamicScale, name)()
    file = tmp_path / f"a{suffix}"
    _files.save(file, write(policy, policy.init(), name))
    assert read(_files.load(file).values) == (policy, policy.init())


def test_leaving_out_what_a_format_cannot_hold_needs_an_option(tmp_path, capsys):
    source, target = tmp_path / "in.json", tmp_path / "out.json"
    policy = DynamicScale.paddle(decr_every_n_nan_or_inf=3)
    _files.save(source, write(policy, policy.init(), "paddle"))
    said = (
        f"{source}: torch's format has no place for a hysteresis of 3 (torch's scaler backs off at "
        "every overflow)"
    )
    assert convert(source, target, "torch") == 1
    assert capsys.readouterr() == ("", f"{said}; --lossy leaves that out\n")
    assert not target.exists()
    assert convert(source, target, "torch", "--lossy") == 0
    done = f"{source}: paddle's format -> {target}, torch's format"
    assert capsys.readouterr() == ("", f"{said}\n{done}\n")
    assert read(json.loads(target.read_text()))[1] == policy.init()


@pytest.fixture
def check_refused(tmp_path, capsys):
    """A file is refused in one line with status 1, and the target stays as it was."""

    def check(source, message):
        target = tmp_path / "out.json"
        target.write_text("as it was")
        assert convert(source, target, "torch") == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert message in err
        assert err.count("\n") == 1
        assert len(err) < 1000
        assert target.read_text() == "as it was"
        assert sorted(tmp_path.glob("out.json*")) == [target]

    return check


class Trap:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


class Codec:
    def __reduce__(self):
        return codecs.encode, ("x", "rot13")


@pytest.mark.parametrize(
    "save",
    [
        lambda trap, path: path.write_bytes(pickle.dumps({"scale": 1.0, "growth_factor": trap}, 4)),
        lambda trap, path: path.write_bytes(pickle.dumps({"scale": 1.0, "growth_factor": trap}, 2)),
        lambda trap, path: torch.save({"scale": trap}, path),
    ],
    ids=["pickle", "protocol 2", "torch"],
)
def test_a_file_that_would_run_code_is_refused(save, tmp_path, check_refused):
    source, proof = tmp_path / "in.pt", tmp_path / "proof"
    save(Trap(proof), source)
    check_refused(source, "refused: it would call io.open")
    assert not proof.exists()


@pytest.fixture(params=[True, False], ids=["zip file", "older file"])
def run(request, tmp_path):
    """The checkpoint of a run, with an object that would write a file if it were unpickled."""
    model = torch.nn.Sequential(torch.nn.Linear(200, 200), torch.nn.BatchNorm1d(200))
    optimizer = torch.optim.Adam(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0, growth_interval=50)
    scaler.scale(model[0](torch.ones(1, 200)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    path = tmp_path / "run.pt"
    torch.save(
        {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scaler": scaler.state_dict(),
            "epoch": 3,
            "trap": Trap(tmp_path / "proof"),
            "parameter": torch.nn.Parameter(torch.ones(2)),
            "random": (torch.get_rng_state(), np.random.default_rng(0), np.zeros(2**16)),
        },
        path,
        _use_new_zipfile_serialization=request.param,
    )
    return path


@pytest.mark.parametrize("options", [(), ("--key", "scaler")])
def test_the_scaler_in_a_run_s_checkpoint_is_converted_without_torch(
    options, run, tmp_path, monkeypatch, capsys
):
    monkeypatch.setitem(sys.modules, "torch", None)
    target = tmp_path / "scaler.json"
    assert convert(run, target, "paddle", *options) == 0
    said = f"{run}: scaler, torch's format -> {target}, paddle's format\n"
    assert capsys.readouterr() == ("", said)
    written = json.loads(target.read_text())
    assert (written["scale"], written["incr_count"]) == ([512.0], 1)
    assert set(written) == set(write(DynamicScale.paddle(), DynamicScale().init(), "paddle"))
    assert not (tmp_path / "proof").exists()


def test_another_key_of_a_run_s_checkpoint_is_refused(run, tmp_path, capsys):
    for key, says in {
        "model": "these keys do not match any known format: 0.weight, 0.bias, 1.weight",
        "model.0.weight": "model.0.weight is not a dict",
        "trap": "trap is not a dict",
        "optimizer.scaler": "the keys in optimizer are state, param_groups",
    }.items():
        assert convert(run, tmp_path / "out.json", "paddle", "--key", key) == 1
        assert says in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == [run]


def test_a_scale_that_is_a_tensor_is_refused_by_its_key(saved, check_refused):
    state_dict = torch.load(saved, weights_only=True)
    torch.save({"scaler": {**state_dict, "scale": torch.ones(1)}, "epoch": 3}, saved)
    check_refused(saved, "scaler: refused: it holds a tensor of torch.FloatStorage, not a number")


def test_a_zip_file_with_a_long_list_is_refused(tmp_path, monkeypatch, check_refused):
    source = tmp_path / "in.pt"
    source.write_bytes(zipped({"a/data.pkl": PICKLE, **{f"a/{i}": b"" for i in range(99)}}))
    assert _files.load(source).values == {"loss_scale": 8.0}
    monkeypatch.setattr(_files, "_MOST_AT_ONCE", 2000)
    check_refused(source, "lists too much for a checkpoint")


def zipped(members, compression=zipfile.ZIP_STORED):
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return data.getvalue()


PICKLE = pickle.dumps({"loss_scale": 8.0}, protocol=2)
DAMAGED, FOREIGN = "damaged, or not a state dict", "is a zip file, but not one of torch's"
UNKNOWN = "do not match any known format"
BAD_FILES = {
    "nothing": (b"", DAMAGED),
    "binary": (b"\x00\x01\x02", DAMAGED),
    "the first bytes of a zip": (b"PK\x03\x04 and no more", DAMAGED),
    "half a frame": (b"\x80\x04\x95", DAMAGED),
    "a text without its letters": (b"\x80\x04}(X\xff\xff\xff\xff", DAMAGED),
    "a memo of 2**27": (b"\x80\x04}r\x00\x00\x00\x08.", f"{DAMAGED}: the pickle's memo has gaps"),
    "a codec": (pickle.dumps({"scale": Codec()}, protocol=4), "refused"),
    "doubled": (b"\x80\x04}(X\x0a\x00\x00\x00loss_scale)" + b"2\x86" * 60 + b"u.", "refused"),
    "long": (b"\x80\x04" + b"(" * 200_000 + b")" + b"\x85" * 200_000 + b".", DAMAGED),
    "large": (b"[1" + b"," * 2**20 + b"]", "too large"),
    "a control code": (b'{"\\u001b[2J": 1}', f"{UNKNOWN}: [2J"),
    "nested": (b"[" * 200_000, "is nested too deeply for a state dict"),
    "a list": (b"[1, 2]", "holds a list, not a dict"),
    "an empty dict": (b"{}", "the state dict is empty"),
    "a line break": (b'{"a\\nb": 1}', f"{UNKNOWN}: a b"),
    "NaN": (
        b'{"scale": NaN, "growth_factor": 2, "backoff_factor": 0.5, "growth_interval": 1, '
        b'"_growth_tracker": 0}', "scale must be positive"
    ),
    "no state in it": (b'{"a": {}}', "no entry has the keys of any known format; the keys are a"),
    "deep": (b'{"loss_scale": {"deep": [1]}}', "loss_scale is a dict, not a number"),
    "300 digits": (b'{"loss_scale": 1' + b"0" * 300 + b"}", "must be positive and finite"),
    "10000 digits": (b'{"loss_scale": 1' + b"0" * 9999 + b"}", "holds a number of 10000 digits"),
    "an array": (pickle.dumps(np.ones(3), 4), "refused: an array of more than one number"),
    "a dict in a dict": (pickle.dumps({"loss_scale": {"a": 1}}), "loss_scale is a dict, not"),
    "zip: empty": (zipped({"scaler/data.pkl": b"\x80\x02}."}), "the state dict is empty"),
    "zip: other": (zipped({"scaler/other": PICKLE}), FOREIGN),
    "zip: two": (zipped({"a/data.pkl": PICKLE, "b/data.pkl": PICKLE}), FOREIGN),
    "zip: compressed": (zipped({"a/data.pkl": PICKLE}, zipfile.ZIP_DEFLATED), FOREIGN),
    "zip: nested": (zipped({"a/data.pkl": zipped({"a/data.pkl": PICKLE})}), "in.pt: "),
    "zip: many": (zipped({f"{i}/data.pkl": b"" for i in range(9000)}), FOREIGN),
    "zip: torn": (zipped({"a/data.pkl": PICKLE})[:-30], DAMAGED),
}  # fmt: skip


@pytest.mark.parametrize(("data", "message"), BAD_FILES.values(), ids=BAD_FILES)
def test_a_damaged_or_foreign_file_is_refused(data, message, tmp_path, check_refused):
    source = tmp_path / "in.pt"
    source.write_bytes(data)
    check_refused(source, message)


def test_a_torn_file_of_torch_s_is_refused(saved, check_refused):
    whole = saved.read_bytes()
    for length in range(4, len(whole), max(1, len(whole) // 40)):
        saved.write_bytes(whole[:length])
        check_refused(saved, "scaler.pt: ")


def test_a_missing_file_a_folder_and_a_bad_name_are_named(saved, tmp_path, capsys):
    assert convert(tmp_path / "none.pt", tmp_path / "out.json", "torch") == 1
    assert capsys.readouterr().err.endswith("none.pt: No such file or directory\n")
    assert convert(tmp_path, tmp_path / "out.json", "torch") == 1
    assert convert(saved, tmp_path / "none" / "out.json", "torch") == 1
    assert convert(saved, tmp_path / "out.xyz", "torch") == 1
    assert "out.xyz: the name must end in one of .json, .pt" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [saved]


def test_an_unknown_format_is_a_wrong_call(saved, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        convert(saved, tmp_path / "out.json", "caffe")
    assert stopped.value.code == 2
    assert "caffe" in capsys.readouterr().err


def test_without_torch_its_files_are_read_and_not_written(saved, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert convert(saved, tmp_path / "out.json", "paddle") == 0
    assert convert(saved, tmp_path / "out.pt", "torch") == 1
    assert "writing torch's files needs torch" in capsys.readouterr().err


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_torch_s_older_files_and_every_binary_protocol_are_read(saved, protocol, tmp_path):
    state_dict = torch.load(saved, weights_only=True)
    path = tmp_path / "old.pt"
    torch.save(
        state_dict, path, _use_new_zipfile_serialization=False, pickle_protocol=min(protocol, 4)
    )
    assert _files.load(path).values == state_dict
    path.write_bytes(pickle.dumps({**state_dict, "scale": np.float32(512)}, protocol=protocol))
    assert _files.load(path).values == state_dict


def test_a_flipped_bit_in_torch_s_file_never_gives_another_scale(saved):
    whole, good = saved.read_bytes(), _files.load(saved)
    for place in range(0, len(whole), 7):
        saved.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        with contextlib.suppress(_files.FileError):
            assert _files.load(saved) == good


def test_a_link_is_followed_and_a_file_keeps_its_mode(saved, tmp_path):
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    target.write_text("")
    target.chmod(0o600)
    link.symlink_to(target)
    assert convert(saved, link, "torch") == 0
    assert link.is_symlink()
    assert json.loads(target.read_text())["scale"] == 512
    assert target.stat().st_mode & 0o777 == 0o600


def test_files_are_written_as_the_umask_says(saved, tmp_path):
    target = tmp_path / "out.json"
    assert convert(saved, target, "torch") == 0
    plain = tmp_path / "plain"
    plain.write_text("")
    assert target.stat().st_mode == plain.stat().st_mode


@pytest.mark.parametrize("compression", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_compressed_bomb_that_lies_about_its_size_stays_packed(
    compression, tmp_path, check_refused
):
    source, size = tmp_path / "in.pt", 2**25 + 1
    data = zipped({"a/data.pkl": bytes(size)}, compression)
    source.write_bytes(data.replace(size.to_bytes(4, "little"), (100).to_bytes(4, "little")))
    tracemalloc.start()
    check_refused(source, FOREIGN)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 2**22


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (np.zeros(1, "V8"), "an array of dtype V8; only bools, integers and floats"),
        (np.complex64(1), "an array of dtype c8;"),
        (np.array(["1"]), "an array of dtype U1;"),
        (np.array([1], object), "an array of dtype O8;"),
        (np.zeros(1, [("a", "f4")]), "an array of dtype V4;"),
        (torch.tensor(1j), "a tensor of torch.ComplexFloatStorage, not a number; save tensor.item"),
        (torch.tensor(1, dtype=torch.uint16), "a tensor of torch.storage.UntypedStorage"),
    ],
    ids=["void", "complex", "text", "object", "record", "complex tensor", "untyped tensor"],
)
def test_the_error_for_an_unknown_dtype_names_it(value, dtype, tmp_path, check_refused):
    source = tmp_path / "in.pt"
    torch.save({"scale": value}, source)
    check_refused(source, f"in.pt: refused: it holds {dtype}")


# The scaler itself.


def test_torch_s_scaler_loads_any_format_with_its_bounds():
    scaler = GradScaler()
    scaler.load_state_dict(
        {
            "current_loss_scale": 2.0,
            "good_steps": 3,
            "initial_scale": 8.0,
            "dynamic_growth_steps": 5,
        }
    )
    state = scaler.get_scale(), scaler._growth_tracker, scaler.get_growth_interval()
    assert state == (2.0, None, 5)
    scales = list(scales_of(scaler, (1.0, 1.0, *[math.inf] * 4)))
    assert scales == [2.0, 4.0, 2.0, 1.0, 1.0, 1.0]  # Keras 2's floor


def test_a_bad_state_dict_changes_nothing():
    scaler = GradScaler(init_scale=4.0)
    for bad, error in (({"scale": 1.0}, KeyError), ({"loss_scale": -1.0}, ValueError)):
        with pytest.raises(error):
            scaler.load_state_dict(bad)
    assert scaler.state_dict() == GradScaler(init_scale=4.0).state_dict()
