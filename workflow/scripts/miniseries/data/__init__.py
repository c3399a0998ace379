"""Text and token files: from a source to shards and a manifest."""
