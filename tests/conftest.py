"""Nothing is shared by all tests but the marks; each folder has its own fixtures."""
