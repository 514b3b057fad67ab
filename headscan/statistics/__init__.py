"""The implementation of every statistic and profile that the catalogue declares."""
