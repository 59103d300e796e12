"""The records of an ``input_file``: detects their format, checks each record, and passes them to aiperf.

Owns reading (encodings, arrays, gzip), the formats of other tools, and the check of every field by aiperf's own models.
Does not send anything: aiperf's loaders read the file itself, or the copy that :func:`write_records` makes.
Enter through :func:`read_dataset`, which returns the detected format and a summary of the records.
Invariant: every field of a record is either sent, or refused with its file, line and name.
"""

from trtx.bench.datasets.checking import read_dataset, write_records
from trtx.bench.datasets.contents import Dataset
from trtx.bench.datasets.reading import count_records

__all__ = ["Dataset", "count_records", "read_dataset", "write_records"]
