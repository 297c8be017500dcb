"""Failures of operations within compiled steps, which frameworks raise as their own exceptions with ours as text."""

from __future__ import annotations

import pytest

import hvdlite as hvd
from hvdlite.elastic.told import told_by, with_own_errors

# As TensorFlow 2.21, Keras 3.15 on it, and JAX 0.10 write them.
OF_TENSORFLOW = """{{function_node __wrapped__PyFunc}} MismatchError: Mismatched shape for tensor 'a': (2,) on rank 0.
Traceback (most recent call last):

  File "/site-packages/tensorflow/python/ops/script_ops.py", line 269, in __call__
    ret = func(*args)

hvdlite.errors.MismatchError: Mismatched shape for tensor 'a': (2,) on rank 0.

 [[{{node hvdlite_a}}]] [Op:__inference_f_12]"""
OF_KERAS = """Graph execution error:

Detected at node hvdlite_one_step_bucket defined at (most recent call last):
  File "train.py", line 18, in <module>

ShutdownError: allreduce of tensor 'a': hvdlite has been shut down.
Traceback (most recent call last):

  File "/site-packages/tensorflow/python/ops/script_ops.py", line 269, in __call__
"""
OF_JAX = """INTERNAL: CpuCallback error calling callback: Traceback (most recent call last):
  File "train.py", line 18, in <module>
  File "/site-packages/hvdlite/engine/handle.py", line 89, in wait
CommunicationError: rank 1 is gone"""
WITHOUT_A_MESSAGE_OF_OURS = """Graph execution error: ValueError: shapes
  File "hvdlite/errors.py", in MyMismatchError: text"""


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        (OF_TENSORFLOW, hvd.MismatchError, "Mismatched shape for tensor 'a': (2,) on rank 0."),
        (OF_KERAS, hvd.ShutdownError, "allreduce of tensor 'a': hvdlite has been shut down."),
        (OF_JAX, hvd.CommunicationError, "rank 1 is gone"),
        ("StallError: one line\nand another", hvd.StallError, "one line\nand another"),
        ("hvdlite.errors.NotInitializedError: use init()", hvd.NotInitializedError, "use init()"),
    ],
)
def test_the_text_of_a_framework_gives_the_failure_back(text, kind, message):
    found = told_by(text)
    assert (type(found), str(found)) == (kind, message)


@pytest.mark.parametrize("text", ["", "InvalidRequestError: mine", WITHOUT_A_MESSAGE_OF_OURS])
def test_what_is_no_failed_operation_is_left(text):
    assert told_by(text) is None


def test_only_exceptions_of_the_framework_are_read():
    class OfFramework(Exception):
        pass

    def failing(error):
        raise error

    converted = with_own_errors(failing, (OfFramework,))
    with pytest.raises(hvd.ShutdownError, match="^gone$") as caught:
        converted(OfFramework("ShutdownError: gone"))
    assert isinstance(caught.value.__cause__, OfFramework)
    for error in (OfFramework("other"), KeyError("ShutdownError: gone"), hvd.MismatchError("a", "shape", {})):
        with pytest.raises(type(error)) as caught:
            converted(error)
        assert caught.value is error
    assert with_own_errors(lambda: 5, ())() == 5
