"""`opd serve teacher`: a frozen model behind HTTP."""
