"""The referee: every published criterion removes heads from one model, on one curve."""
