"""Classes whose new objects are seen."""

import warnings

from gradscaler._run_script.after_init import after_init


class Own:
    def __init__(self):
        warnings.warn("deprecated", stacklevel=2)


def test_a_warning_of_a_seen_class_names_the_line_that_makes_the_object():
    seen = []
    after_init(Own, seen.append)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        made = Own()
    assert seen == [made]
    assert [each.filename for each in said] == [__file__]


class Stale:
    pass


def test_what_nothing_refers_to_any_more_is_not_seen():
    alive, stale, seen = Stale(), Stale(), []
    stale.itself = stale
    del stale
    after_init(Stale, seen.append)
    assert seen == [alive]
