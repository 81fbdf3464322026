"""Reports: runs and results side by side, as tables, figures and one page."""
