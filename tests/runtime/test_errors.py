"""The error tree: complete table, unique reasons, and nothing lost between processes."""

from __future__ import annotations

import pickle

import grpc
import pytest
from katydid_runtime import errors
from katydid_runtime.errors import OUTCOMES, InternalError, KatydidError, OverloadedError, error_from_details


def tree(root: type[KatydidError] = KatydidError) -> list[type[KatydidError]]:
    """The classes of the module; other rooms derive their own, for their own use."""
    children = [child for child in root.__subclasses__() if child.__module__ == errors.__name__]
    return [root, *(found for child in children for found in tree(child))]


@pytest.mark.parametrize("error_class", tree(), ids=lambda c: c.__name__)
def test_every_class_has_its_row_its_reason_and_its_place_in_the_drawing(error_class):
    outcome = OUTCOMES[error_class]
    assert outcome.grpc_status in grpc.StatusCode.__members__
    assert 400 <= outcome.http_status < 600
    assert [c.reason for c in tree()].count(error_class.reason) == 1
    assert f" {error_class.__name__} " in f" {errors.__doc__} ".replace("\n", " ")
    assert error_class.__name__ in errors.__all__


def test_only_errors_that_leave_no_output_behind_are_retryable():
    retryable = {error_class.__name__ for error_class, outcome in OUTCOMES.items() if outcome.retryable}
    assert retryable == {"OverloadedError", "QuotaExceededError", "UnavailableError", "DrainingError"}


@pytest.mark.parametrize("error_class", tree(), ids=lambda c: c.__name__)
def test_details_rebuild_the_error(error_class):
    if error_class is InternalError:
        error = InternalError("broken", error_id="abc")
    else:
        error = error_class("no", field="temperature", value=3, allowed="0 to 2", retry_after_s=1.5)
    for copy in (error_from_details(error.reason, str(error), error.details()), pickle.loads(pickle.dumps(error))):
        assert type(copy) is error_class
        assert vars(copy) == vars(error)


def test_an_unknown_reason_keeps_its_message():
    error = error_from_details(
        "FROM_THE_FUTURE", "a newer server says no", {"retryable": "maybe", "retry_after_s": "?"}
    )
    assert type(error) is KatydidError
    assert str(error) == "a newer server says no"
    assert error.retry_after_s is None


def test_a_class_of_another_room_counts_as_its_base():
    class WingBrokenError(errors.UnavailableError):
        pass

    error = WingBrokenError("one wing is broken")
    assert (error.outcome, error.reason) == (OUTCOMES[errors.UnavailableError], "UNAVAILABLE")
    assert error.retryable


def test_a_long_value_is_shortened():
    error = errors.InvalidRequestError("too long", field="prompt", value="secret " * 1000)
    assert error.value is not None
    assert len(error.value) == 128
    assert len(str(errors.KatydidError("x" * 5000))) == 1024


def test_texts_can_be_sent_whatever_they_quote():
    error = errors.InvalidRequestError("no \ud800", value="\udfff" * 1000)
    assert error.message == "no \\ud800"
    assert error.value is not None
    assert len(error.value.encode()) == 130
    assert error.value.startswith("\\udfff")


def test_details_hold_only_what_is_known():
    assert OverloadedError("full").details() == {"retryable": "true"}
    assert errors.PromptTooLongError("x", value=0).details() == {"retryable": "false", "value": "0"}
