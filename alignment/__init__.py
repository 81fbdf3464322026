"""How student tokens and teacher tokens correspond."""

if __name__ != "opd.alignment":
    raise ImportError("import this package as opd.alignment: the top-level folder is only its place in the repository")
