"""The form that a request asks of its answer, and the check of an answer against it.

Owns JSON schemas, regular expressions, choices and grammars of the text, and offered tools of the calls. Whether an
answer is complete at all is decided in ``bench/answers.py``. Enter through :func:`requested_format`: it reads a request
body, and the result judges what :class:`AnswerContent` collects from a response. Pure: nothing is fetched, also no
reference of a schema. Invariant: an answer counts as following its format only if it was checked.
"""

from trtx.bench.answer_formats.content import AnswerContent
from trtx.bench.answer_formats.requested import FormatResult, RequestedFormat, requested_format
from trtx.bench.answer_formats.text_formats import FORMAT_FIELDS, WrongFormat

__all__ = ["FORMAT_FIELDS", "AnswerContent", "FormatResult", "RequestedFormat", "WrongFormat", "requested_format"]
