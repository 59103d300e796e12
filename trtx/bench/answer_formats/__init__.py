"""Structured output: the format that a request demands of its answer, and the check of an answer against it.

Owns the formats of a text (JSON schema, regular expression, choice, grammar) and the tools that a request offers.
``bench/answers.py`` decides whether an answer is complete at all. Enter through :func:`requested_format`: it reads a
request body, and the result judges what :class:`AnswerContent` collects from a response. Pure: it fetches nothing, not
even references of a schema. Invariant: an answer counts as following its format only if it was checked.
"""

from trtx.bench.answer_formats.content import AnswerContent
from trtx.bench.answer_formats.requested import FormatResult, RequestedFormat, requested_format
from trtx.bench.answer_formats.text_formats import FORMAT_FIELDS, WrongFormat

__all__ = ["FORMAT_FIELDS", "AnswerContent", "FormatResult", "RequestedFormat", "WrongFormat", "requested_format"]
