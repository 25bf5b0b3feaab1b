"""Tokens and text: tokenizer, chat template, text as it grows, calls of tools in it. No torch."""
