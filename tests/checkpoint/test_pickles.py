"""The reader of pickles, on hostile ones."""

import collections
import contextlib
import faulthandler
import io
import pickle
import sys
import tracemalloc
import types

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from gradscaler.__main__ import main
from gradscaler.checkpoint import _pickles
from tests.support.chosen import examples


@pytest.fixture(autouse=True)
def alarm():
    """Ends a process that hangs: no Python code runs in the repr of a tuple."""
    faulthandler.dump_traceback_later(300, exit=True, file=sys.__stderr__)
    yield
    faulthandler.cancel_dump_traceback_later()


def load(data):
    return _pickles.load(io.BytesIO(data))


def text(letters):
    data = letters.encode()
    return b"X" + len(data).to_bytes(4, "little") + data


def named(module, attribute):
    return f"c{module}\n{attribute}\n".encode()


def doubled(levels=29):
    """A value of 2**levels parts in few bytes: each tuple holds the one before it twice."""
    pairs = (b"0h%ch%c\x86q%c" % (level, level, level + 1) for level in range(levels))
    return b")q\x00" + b"".join(pairs)


# The places where a value can be that must stay closed.
ENCODE, DTYPE = named("_codecs", "encode"), named("numpy", "dtype")
SCALAR, TUPLE = named("numpy.core.multiarray", "scalar"), named("builtins", "tuple")
RECONSTRUCT = named("numpy.core.multiarray", "_reconstruct")
FLOAT = DTYPE + text("f4") + b"\x85R"
PLACES = {
    "called": (b"", b")R."),
    "arguments": (DTYPE, b"R."),
    "text": (ENCODE, text("latin1") + b"\x86R."),
    "codec": (ENCODE + text("x"), b"\x86R."),
    "dtype": (DTYPE, b"\x85R."),
    "order": (FLOAT + b"K\x03", b"\x86b."),
    "state of a dtype": (FLOAT, b"b."),
    "scalar": (SCALAR + FLOAT, b"\x86R."),
    "scalar's dtype": (SCALAR, b"C\x00\x86R."),
    "tuple": (TUPLE, b"\x85R."),
    "module": (b"", text("x") + b"\x93)R."),
    "attribute": (text("x"), b"\x93)R."),
    "key": (b"}", b"K\x01s."),
    "value": (b"}" + text("scale"), b"s."),
    "storage": (b"", b"Q."),
    "pickle": (b"", b"."),
}


def test_a_small_file_that_doubles_a_tuple_29_times_is_not_read():
    data = b"\x80\x02" + doubled() + b")R."
    assert len(data) < 250
    assert "nested tuples" in load(data).why


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("levels", [1, 29])
def test_a_value_that_doubles_is_one_line_and_status_1_anywhere(place, levels, tmp_path, capsys):
    before, after = PLACES[place]
    source, target = tmp_path / "in.pt", tmp_path / "out.json"
    source.write_bytes(b"\x80\x02" + before + doubled(levels) + after)
    assert main(["convert", str(source), str(target), "--to", "torch"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith(f"{source}: ")
    assert len(err) < 1000
    assert not target.exists()


def peak(data):
    """The peak of memory while reading, and the result or the error."""
    tracemalloc.start()
    try:
        value = load(data)
    except ValueError as error:
        value = error
    finally:
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    return most, value


@pytest.mark.parametrize(
    "again", [ENCODE + b"h\x00" + text("latin1") + b"\x86R", b"h\x00h\x00\x93"]
)
def test_a_long_text_used_often_takes_no_more_memory(again):
    data = b"\x80\x02" + text("<" * 2**18) + b"q\x00" + again * 1000 + b"."
    most, error = peak(data)
    assert isinstance(error, ValueError)
    assert most < 4 * len(data)


NO_ARRAY = "an array of more than numbers"
UNREAD = {
    "tuple": (b"(" + b"N" * 17 + b"t", "long or nested tuples"),
    "dtype": (DTYPE + text("f" * 300) + b"\x85R", NO_ARRAY),
    "name": (named("x" * 101, "x"), "would import something"),
    "list": (b"]K\x01a", "more than numbers (APPEND)"),
    "object": (named("x", "Y") + b")\x81}b", "more than numbers (NEWOBJ)"),
    "call": (named("x", "Y") + b")R", "it would call x.Y"),
    "argument": (named("x", "Y") + DTYPE + text("c8") + b"\x85R\x85R", "an array of dtype c8"),
    "storage": (
        text("storage") + named("torch", "HalfStorage") + b"\x86Q",
        "a tensor of torch.HalfStorage, not a number; save tensor.item()",
    ),
    # Values that are nearly an array of one number.
    "order": (FLOAT + b"(K\x03K\x01tb", NO_ARRAY),
    "unknown order": (FLOAT + b"(K\x03" + text("x") + b"tb", NO_ARRAY),
    "no dtype": (SCALAR + RECONSTRUCT + b")RC\x04\0\0\x80?\x86R", NO_ARRAY),
    "no bytes": (SCALAR + FLOAT + text("1234") + b"\x86R", NO_ARRAY),
    "no text": (ENCODE + b"NN\x86R", "it would call _codecs.encode"),
    "a letter": (ENCODE + text("\u20ac") + text("latin1") + b"\x86R", NO_ARRAY),
    "no arguments": (DTYPE + b")R", "it would call numpy.dtype"),
    "dtype alone": (FLOAT, "more than numbers"),
    "empty array": (RECONSTRUCT + b")R", "more than numbers"),
    "bytes": (b"C\x01x", "more than numbers"),
    "a long text": (text("x" * 70_000), "a long value"),
    "long bytes": (b"\x8e" + (70_000).to_bytes(8, "little") + b"x" * 70_000, "a long value"),
}


@pytest.mark.parametrize(("program", "message"), UNREAD.values(), ids=UNREAD)
def test_what_is_not_a_number_says_why_and_leaves_the_rest_readable(program, message):
    data = b"\x80\x02}(" + text("a") + program + text("b") + b"K\x07u."
    read = load(data)
    assert read.pop("b") == 7
    assert message in read["a"].why
    assert message in load(b"\x80\x02" + program + b".").why


@pytest.mark.parametrize("name", ["_MOST_OPCODES", "_MOST_BYTES"])
def test_a_pickle_that_is_too_long_is_refused(name, monkeypatch):
    monkeypatch.setattr(_pickles, name, 1000)
    assert load(b"\x80\x02" + b"K\x010" * 400 + b"N.") is None
    with pytest.raises(_pickles.RefusedError, match="too much"):
        load(b"\x80\x02" + b"K\x010" * 1200 + b"N.")


def test_a_long_value_is_skipped_without_being_read():
    class Zeros(io.RawIOBase):
        """A pickle of a gigabyte, most of it not in memory."""

        parts = b"\x80\x02}(" + text("w") + b"B\0\0\0\x40", text("b") + b"K\x07u."
        place = 0

        def tell(self):
            return self.place

        def seek(self, offset, whence=0):
            end = len(self.parts[0]) + 2**30 + len(self.parts[1])
            self.place = offset + (0, self.place, end)[whence]
            return self.place

        def read(self, size):
            before, after = self.parts
            start = self.place - len(before) - 2**30
            data = after[start : start + size] if start >= 0 else before[self.place :][:size]
            self.place += len(data)
            return data

    read = _pickles.load(Zeros())
    assert read["b"] == 7
    assert "a long value" in read["w"].why


@pytest.mark.parametrize("cut", [b"", b"x" * 70_000])
def test_a_long_value_that_is_not_all_there_is_damaged(cut):
    with pytest.raises(ValueError, match="has no end"):
        load(b"\x80\x02" + b"X\xff\xff\xff\x7f" + cut)


def test_a_dict_may_hold_itself_and_other_keys_than_texts():
    read = load(b"\x80\x02}q\x00(" + text("a") + b"h\x00K\x01K\x02)K\x03u.")
    assert list(read) == ["a", "1"]
    assert read["a"] is read
    assert read["1"] == 2


def test_dicts_of_other_classes_are_dicts():
    model = collections.OrderedDict(a=1)
    model._metadata = collections.OrderedDict(version=2)
    assert load(pickle.dumps({"m": model}, 2)) == {"m": {"a": 1}}
    assert load(pickle.dumps(collections.defaultdict(list, a=1), 4)) == {"a": 1}


# Pickles that Python itself writes.

NUMBERS = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**80), 2**80), st.floats(allow_nan=False), st.text()
)


@given(st.dictionaries(st.text(), NUMBERS), st.integers(2, pickle.HIGHEST_PROTOCOL))
def test_numbers_and_texts_are_read_as_pickle_reads_them(values, protocol):
    assert load(pickle.dumps(values, protocol)) == values


@pytest.mark.parametrize("protocol", [2, 3, 4])
@pytest.mark.parametrize("code", [*"?bhilqBHILQefd", ">f4", ">i8"])
def test_an_array_of_one_number_is_read_as_that_number(code, protocol):
    for value in (np.array([3], code), np.array(3, code), np.array([3], code)[0]):
        read = load(pickle.dumps(value, protocol))
        assert (read, type(read)) == (value.item(), type(value.item()))


# Programs by a grammar, whole and damaged.


@pytest.fixture(scope="module")
def calls():
    """The calls of a function that a pickle can name."""
    made = []
    trap = types.ModuleType("gradscaler_trap")
    trap.spring = lambda *arguments: made.append(arguments)
    sys.modules["gradscaler_trap"] = trap
    yield made
    del sys.modules["gradscaler_trap"]


def joined(*parts):
    return st.tuples(*(st.just(part) if isinstance(part, bytes) else part for part in parts)).map(
        b"".join
    )


SLOTS = st.integers(0, 2).map(lambda slot: bytes([slot]))
NAMES = ["scale", "x", "latin1", "f4", "i8", "<", "V8", "c16", "numpy", "ndarray"]
TEXTS = st.sampled_from([*NAMES, "gradscaler_trap"]).map(text)
LITERALS = st.one_of(
    st.sampled_from(
        [b"N", b"\x88", b"\x89", b")", b"}", b"]", b"K\x01", b"M\x01\x02", b"J\0\0\0\0"]
    ),
    st.sampled_from(
        [b"G?\xf0\0\0\0\0\0\0", b"\x8a\x02\x01\x02", b"\x8a\xff" + b"\x7f" * 255, b"("]
    ),
    st.sampled_from([b"C\x04\0\0\x80?", b"C\x01b", b"B\x08\0\0\0" + b"\0" * 8, b"U\x01x", b"I1\n"]),
    TEXTS,
    st.sampled_from(["", "f" * 300]).map(text),
    st.integers(1, 29).map(doubled),
)
GLOBALS = st.sampled_from(
    [
        *(ENCODE, DTYPE, SCALAR, TUPLE, named("numpy._core.multiarray", "_reconstruct")),
        *(named("numpy", "ndarray"), named("gradscaler_trap", "spring"), named("torch", "x")),
        *(text("gradscaler_trap") + text("spring") + b"\x93", named("__builtin__", "tuple")),
    ]
)
VALUES = st.deferred(
    lambda: st.one_of(
        LITERALS,
        GLOBALS,
        st.sampled_from([FLOAT, FLOAT + b"(K\x03" + text("<") + b"NNNJ\xff\xff\xff\xffK\0K\0tb"]),
        joined(b"h", SLOTS),
        joined(VALUES, b"q", SLOTS),
        joined(VALUES, b"\x94"),
        joined(VALUES, b"\x85"),
        joined(VALUES, VALUES, b"\x86"),
        joined(VALUES, VALUES, VALUES, b"\x87"),
        joined(b"(", st.lists(VALUES, max_size=20).map(b"".join), b"t"),
        joined(b"}", VALUES, VALUES, b"s"),
        joined(b"}(", st.lists(joined(TEXTS, VALUES)).map(b"".join), b"u"),
        joined(VALUES, VALUES, b"\x93"),
        joined(VALUES, VALUES, b"R"),
        joined(GLOBALS, VALUES, b"\x85R"),
        joined(GLOBALS, VALUES, VALUES, b"\x86R"),
        joined(GLOBALS, VALUES, VALUES, VALUES, b"\x87R"),
        joined(VALUES, VALUES, b"b"),
        joined(VALUES, b"Q"),
        joined(VALUES, VALUES, b"\x81"),
    )
)  # fmt: skip
STARTS = st.sampled_from(
    [b"\x80\x02", b"\x80\x04", b"\x80\x04\x95\xff\0\0\0\0\0\0\0", b"\x80\xff", b""]
)
ARRAYS = joined(SCALAR + FLOAT, b"q", SLOTS, b"C\x04\0\0\x80?\x86R")
ITEMS = joined(TEXTS, st.one_of(ARRAYS, LITERALS, joined(LITERALS, b"q", SLOTS), VALUES))
STATES = joined(b"}(", st.lists(ITEMS, max_size=5).map(b"".join), b"u")
PROGRAMS = joined(STARTS, st.one_of(STATES, VALUES), b".")


@st.composite
def damaged(draw):
    """A program without a piece, or with another in its place."""
    data = draw(PROGRAMS)
    start = draw(st.integers(0, len(data)))
    piece = draw(st.one_of(st.binary(max_size=5), VALUES))
    return data[:start] + piece + data[start + draw(st.integers(0, 5)) :]


def check_plain(value):
    """Assert that values are of the kinds that ``load`` promises. A dict may hold itself."""
    todo, seen = [value], set()
    while todo:
        part = todo.pop()
        if type(part) is dict and id(part) not in seen:
            seen.add(id(part))
            assert all(type(key) is str for key in part)
            todo += part.values()
        elif type(part) is _pickles.Unread:
            assert part.why.startswith("refused: ")
            assert len(part.why) < 1000
        else:
            assert type(part) in (int, float, bool, str, type(None), dict)


@settings(max_examples=examples(500))
@given(data=st.one_of(PROGRAMS, damaged(), st.binary(max_size=40)))
@example(data=b"\x8d" + b"\xff" * 8)  # a length beyond any file
@example(data=b"c\\\x00\n")  # an escape that Python warns of
def test_any_bytes_give_plain_values_or_a_value_error_and_call_nothing(data, calls):
    most, value = peak(data)
    assert most < 2**19 + 100 * len(data)
    assert calls == []
    if isinstance(value, ValueError):
        assert len(str(value)) < 1000
    else:
        check_plain(value)


STATE = {"scale": 8.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 9}
CHECKPOINT = pickle.dumps(
    {"model": [1, {"a": (2, 3)}], "epoch": 3, "state": {"scaler": {**STATE, "_growth_tracker": 1}}},
    protocol=4,
)


@settings(max_examples=examples(300), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_bytes_in_a_checkpoint_are_converted_or_refused_in_one_line(data, tmp_path, calls):
    """The program stands where the model was, or bytes are changed anywhere."""
    whole = CHECKPOINT
    if data.draw(st.booleans()):
        program = data.draw(VALUES)
        whole = b"\x80\x04}(" + text("model") + program + text("s") + CHECKPOINT[2:-1] + b"u."
    else:
        start = data.draw(st.integers(0, len(whole)))
        whole = whole[:start] + data.draw(st.binary(max_size=5)) + whole[start + 2 :]
    source, target = tmp_path / "in.pt", tmp_path / "out.json"
    source.write_bytes(whole)
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        key = data.draw(st.sampled_from([[], ["--key", "state.scaler"], ["--key", "s"]]))
        status = main(["convert", str(source), str(target), "--to", "flax", "--lossy", *key])
    assert status in (0, 1)
    assert said.getvalue().count("\n") >= 1
    assert len(said.getvalue()) < 2000
    assert calls == []
