"""A scaler's state in a checkpoint: found, or named by its key."""

import json
import pickle
import types

import pytest

from gradscaler.__main__ import main
from gradscaler.checkpoint import _files, _pickles, _search, convert, read

STATE = {
    "scale": 1024.0,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 200,
    "_growth_tracker": 7,
}
OTHER = {"loss_scale": 8.0}


def looped():
    """A checkpoint that holds itself, and each of whose dicts holds the next one twice."""
    inner = {"scaler": STATE}
    for _ in range(100):
        inner = {"a": inner, "b": inner}
    outer = {"inner": inner}
    outer["self"] = inner["outer"] = outer
    return outer


def deep(levels):
    inner = {"scaler": STATE}
    for _ in range(levels):
        inner = {"a": inner}
    return inner


@pytest.mark.parametrize(
    ("saved", "key"),
    [
        (STATE, None),
        ({**STATE, "inner": {"scaler": OTHER}}, None),
        ({"scaler": STATE, "lr": 1}, "scaler"),
        ({"epoch": 3, "state": {"model": {"w": 1}, 0: {"amp": STATE}}}, "state.0.amp"),
        ({"a": types.MappingProxyType({"b": STATE})}, "a.b"),
        ({"scaler": STATE, "best": {"scaler": None}, "scales": [STATE]}, "scaler"),
        (looped(), "inner" + ".a" * 100 + ".scaler"),
        (deep(20_000), "a." * 20_000 + "scaler"),
    ],
)
def test_the_only_state_in_a_checkpoint_is_found(saved, key):
    found, state = _search.find(saved, None)
    assert found == key
    assert {name: state[name] for name in STATE} == STATE
    assert read(saved) == read(STATE)
    assert convert(saved, "flax") == convert(STATE, "flax")


@pytest.mark.parametrize(
    "key", ["a", "b.c", "b.d.e", "b.f.g", "h.i", "h.i.j", "7", "", "b.", "self.self.a", "b.only"]
)
def test_a_key_names_one_of_several_states(key):
    saved = {"a": STATE, "b": {"c": STATE, "d.e": STATE, "": STATE, "only": {"scaler": STATE}}}
    saved["b.f"] = {"g": STATE}
    saved |= {"h": {"i": OTHER, "i.j": STATE}, "h.i": STATE, 7: STATE, "": STATE}
    saved["self"] = saved
    assert read(saved, key=key) == read(STATE)
    assert convert(saved, "flax", key=key) == convert(STATE, "flax")


def refused(saved, key=None):
    with pytest.raises((TypeError, ValueError)) as raised:
        read(saved, key=key)
    message = str(raised.value)
    assert "\n" not in message
    assert len(message) < 1500
    with pytest.raises(type(raised.value)) as again:
        convert(saved, "flax", key=key)
    assert str(again.value) == message
    return message


def test_several_states_are_named():
    saved = {"gan": {"d": STATE, "g": OTHER}, "ema": STATE}
    said = "scalers' states are under several keys: ema, gan.d, gan.g; pass key="
    assert refused(saved) == said
    assert refused(saved, "gan").endswith(": gan.d, gan.g; pass key=")
    many = {f"{i}{'x' * 1000}": dict(STATE) for i in range(1000)}
    assert refused(many).endswith(f"11{'x' * 78}, and more; pass key=")


def test_a_key_that_is_not_there_gets_a_list_of_those_that_are():
    saved = {"model": {"w": 1}, "state": {"scaler": STATE, "lr.x": 1}, "epoch": 3}
    keys = "the keys are model, state, epoch"
    assert refused(saved, "scaler") == f"there is no key 'scaler'; {keys}"
    inside = "the keys in state are scaler, lr.x"
    assert refused(saved, "state.amp") == f"there is no key 'state.amp'; {inside}"
    joined = f"there is no key 'state-scaler'; {keys}"
    assert refused(saved, "state-scaler") == joined  # only a dot parts names
    assert refused(saved, "epoch") == "epoch is a int, not a dict"
    assert refused(saved, 3) == "key must be a str, got int"
    assert refused(saved, "model") == "these keys do not match any known format: w"
    assert refused({"a": {"b": {}}}).startswith("no entry has the keys of any known format")
    assert refused({"a": {}}, "a").startswith("the state dict is empty, like that of a disabled")
    assert refused([STATE], "a") == "state_dict must be a dict, got list"
    assert "there is no key" in refused(looped(), "self." * 5000 + "x")


@pytest.fixture
def converted(tmp_path, capsys):
    """The values that ``convert`` wrote to a JSON file, or None, and its message."""

    def run(data, *options, name="run.pt", target="out.json"):
        source, target = tmp_path / name, tmp_path / target
        source.write_bytes(data)
        status = main(["convert", str(source), str(target), "--to", "flax", *options])
        out, err = capsys.readouterr()
        assert out == ""
        assert err.count("\n") == 1
        assert err.startswith(f"{source}: ")
        said = err.removeprefix(f"{source}: ").rstrip("\n").replace(f"{tmp_path}/", "")
        return (json.loads(target.read_text()) if status == 0 else None), said

    return run


@pytest.mark.parametrize("dumps", [lambda saved: json.dumps(saved).encode(), pickle.dumps])
def test_a_file_is_searched_and_the_key_is_said(dumps, converted):
    flax = {key: value.item() if hasattr(value, "item") else value
            for key, value in convert(STATE, "flax").items()}  # fmt: skip
    done = "torch's format -> out.json, flax's format"
    both = dumps({"scaler": STATE, "state": {"amp.scaler": STATE}, "epoch": 3})
    assert converted(dumps(STATE)) == (flax, done)
    assert converted(dumps({"scaler": STATE, "epoch": 3})) == (flax, f"scaler, {done}")
    assert converted(both, "--key", "state.amp.scaler") == (flax, f"state.amp.scaler, {done}")
    several = "scalers' states are under several keys: scaler, state.amp.scaler; pass --key"
    assert converted(both) == (None, several)
    missing = "there is no key 'amp'; the keys are scaler, state, epoch"
    assert converted(both, "--key", "amp") == (None, missing)
    assert converted(both, "--key", "epoch") == (None, "epoch is not a dict")
    bad = dumps({"scaler": {**STATE, "scale": {}}})
    assert converted(bad) == (None, "scaler: scale is a dict, not a number")


def test_a_file_with_more_than_the_state_is_not_replaced_by_the_state(tmp_path, capsys):
    path, link = tmp_path / "run.json", tmp_path / "link.json"
    link.symlink_to(path)
    for saved in ({"scaler": STATE, "epoch": 3}, {**STATE, "epoch": 3}):
        path.write_text(json.dumps(saved))
        for target in (path, link):
            assert main(["convert", str(path), str(target), "--to", "flax"]) == 1
            said = (
                "holds more than a scaler's state, and would be replaced by the state alone; "
                "name another file"
            )
            assert capsys.readouterr().err == f"{target}: {said}\n"
            assert json.loads(path.read_text()) == saved


class Foreign:
    """Its pickle names a class that is not there when it is read."""

    def __init__(self):
        self.x = [1, {2}]


def test_what_is_unknown_stays_unread_unless_the_state_needs_it(converted):
    saved = {"config": Foreign(), "call": pickle.PickleBuffer, "scaler": STATE, "set": {1}}
    assert converted(pickle.dumps(saved, 4))[0]["fin_steps"] == 7
    for key, value in (("scale", Foreign()), ("_growth_tracker", {1}), ("growth_factor", [2.0, 1])):
        bad = {"model": Foreign(), "scaler": {**STATE, key: value}}
        assert converted(pickle.dumps(bad, 4))[1].startswith("scaler: refused: it holds more than")
    wrong = pickle.dumps({"scaler": STATE, "config": Foreign()}, 4)
    assert converted(wrong, "--key", "config") == (None, "config is not a dict")
    assert converted(pickle.dumps([STATE]))[1] == "refused: it holds more than numbers (APPEND)"


@pytest.mark.parametrize(
    "saved",
    [
        b"}" + b"X\1\0\0\0a}" * 50_000 + b"s" * 50_000,
        b"}q\0" + b"(X\1\0\0\0ah\0X\1\0\0\0bh\0u",
        b"}q\0" + b"".join(b"0}q%c(X\1\0\0\0ah%cX\1\0\0\0bh%cu" % (i + 1, i, i) for i in range(99)),
    ],
    ids=["deep", "in itself", "doubled"],
)
@pytest.mark.parametrize("options", [(), ("--key", "a" + ".a" * 2000), ("--key", "b.a.c")])
def test_deep_looped_and_doubled_dicts_end_in_one_line(saved, options, converted):
    _, said = converted(b"\x80\x02" + saved + b".", *options)
    assert "no entry has the keys" in said or "there is no key" in said or "empty" in said


def test_a_deep_json_file_ends_in_one_line(converted):
    data = b'{"a": ' * 100_000 + b"1" + b"}" * 100_000
    assert converted(data) == (None, "is nested too deeply for a state dict")


def test_only_the_pickle_of_a_large_zip_file_is_read(tmp_path, monkeypatch):
    """The file refuses to be read where its tensors are."""
    torch = pytest.importorskip("torch")
    path = tmp_path / "run.pt"
    torch.save({"model": torch.zeros(2**20), "scaler": STATE}, path)
    sizes = []
    reader = _files._Frugal.read

    def watched(self, size=-1):
        data = reader(self, size)
        sizes.append(len(data))
        return data

    monkeypatch.setattr(_files._Frugal, "read", watched)
    assert _files.load(path) == ("scaler", STATE, False)
    assert sum(sizes) < 2**19
    assert not issubclass(_pickles.Unread, dict)
