"""The model that learns: loading, sampling, and handing its weights to the sampler."""

if __name__ != "opd.students":
    raise ImportError("import this package as opd.students: the top-level folder is only its place in the repository")
