"""Environment `returns_desk`: a shop's help desk with a small database, JSON tools, rules and a scripted customer."""
