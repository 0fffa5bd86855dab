"""Batches of text, tokens, records and images: file discovery, train/validation split, loading.

The loader shuffles, shards by process and resumes. This package does not use JAX devices: the
process index and the process count are plain integers. Start reading in `loader.py`. `samples.py`
defines what a loader yields; `tokens.py` and `packing.py` turn documents into rows. Sources of
records are in `documents.py` (JSONL), `arrow.py` and `array_record.py`; sources of images are in
`images.py` and `encoded_images.py`.
"""

from .array_record import ArrayRecordSource as ArrayRecordSource
from .arrow import DatasetsSource as DatasetsSource
from .arrow import ParquetSource as ParquetSource
from .documents import DocumentSource as DocumentSource
from .documents import JsonlSource as JsonlSource
from .encoded_images import ImageFolder as ImageFolder
from .encoded_images import ImageRecords as ImageRecords
from .files import TextFile as TextFile
from .files import find_files as find_files
from .files import split_bytes as split_bytes
from .files import split_files as split_files
from .files import standard_library_files as standard_library_files
from .images import Images as Images
from .images import ImageSet as ImageSet
from .images import ImageSource as ImageSource
from .images import SyntheticImages as SyntheticImages
from .images import load_images as load_images
from .loader import ImageLoader as ImageLoader
from .loader import Loader as Loader
from .loader import TextLoader as TextLoader
from .packing import PackedRows as PackedRows
from .packing import pack as pack
from .samples import LocalBatch as LocalBatch
from .samples import Mixture as Mixture
from .samples import Samples as Samples
from .samples import Sequences as Sequences
from .samples import TokenSamples as TokenSamples
from .samples import local_rows as local_rows
from .samples import num_windows as num_windows
from .samples import shuffled as shuffled
from .samples import spread_starts as spread_starts
from .samples import windows_at as windows_at
from .text import TextSource as TextSource
from .text import load_text as load_text
from .tokenizer import Tokenizer as Tokenizer
from .tokenizer import byte_tokenizer as byte_tokenizer
from .tokenizer import load_tokenizer as load_tokenizer
from .tokens import Text as Text
from .tokens import TokenSource as TokenSource
from .tokens import Windows as Windows
from .tokens import segments_of as segments_of
