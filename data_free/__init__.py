"""Teacher-authored prompts."""

if __name__ != "opd.data_free":
    raise ImportError("import this package as opd.data_free: the top-level folder is only its place in the repository")
