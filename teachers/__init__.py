"""Frozen teachers: what scores the student's rollouts."""

if __name__ != "opd.teachers":
    raise ImportError("import this package as opd.teachers: the top-level folder is only its place in the repository")
