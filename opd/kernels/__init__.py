"""The memory-bound maths over the vocabulary, in blocks of rows that stay in cache."""
