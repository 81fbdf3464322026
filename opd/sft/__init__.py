"""Supervised fine-tuning on answers: the cold start of a student, through transformers' Trainer."""
