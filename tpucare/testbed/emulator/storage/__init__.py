"""Cloud Storage in memory, behind its JSON API."""
