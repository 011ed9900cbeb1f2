"""URLs of folders in buckets of S3, Google Cloud Storage and Azure."""

SCHEMES = ("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az")


def is_bucket(path: str) -> bool:
    scheme, found, _ = path.partition("://")
    return bool(found) and scheme in SCHEMES
