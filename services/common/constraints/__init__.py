"""Rules that an output must obey: their limits, their translation to grammars, and the check that these can be met."""
