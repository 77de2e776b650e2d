"""Reads what a model writes: thinking, tool calls, text. Pure: text in, parts out, the same however the text is cut."""
