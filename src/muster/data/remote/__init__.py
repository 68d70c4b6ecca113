"""Data on S3, Google Cloud Storage, the Hugging Face Hub or the web: found by its address, and copied to this
machine's disk before it is read, so that everything else only knows files."""

from muster.data.remote.files import AT_A_TIME, download, fetch, find, size_of, url_of

__all__ = ["AT_A_TIME", "download", "fetch", "find", "size_of", "url_of"]
