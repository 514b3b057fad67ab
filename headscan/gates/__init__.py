"""Gates on the heads of a frozen model, fitted by gradient steps: which heads may close."""
