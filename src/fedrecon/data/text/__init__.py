"""Text: corpora, vocabularies, sentences."""
