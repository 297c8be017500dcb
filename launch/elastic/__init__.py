"""Jobs of changing size: hvdrun starts the ranks again, at the size that hosts allow. See docs/elastic.md."""
