"""What a user can get wrong. Each message names the value, the limit and the mend, and fits one line."""


class HeadscanError(Exception):
    """Base of all errors that a user can mend; the command line prints it as one line and exits with 2."""


class ModelLoadError(HeadscanError):
    """A model or tokenizer is missing, is not a decoder, or cannot be loaded."""


class UnsupportedModelError(HeadscanError):
    """The model loads, but its heads cannot be measured rightly."""


class UnknownNameError(HeadscanError):
    """A score or statistic that the catalogue lacks."""


class HeadIndexError(HeadscanError):
    """A head that the model lacks."""


class SequenceError(HeadscanError):
    """Token ids or lengths that cannot be measured: wrong shape, empty, or longer than the context."""


class InterventionError(HeadscanError):
    """A mask or rule that cannot be applied as asked."""


class NotFiniteError(HeadscanError):
    """A statistic came out as NaN or infinite."""
