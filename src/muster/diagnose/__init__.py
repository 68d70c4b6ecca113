"""Diagnosis of failed and hanging runs: known failures as data, and the rank that caused a hang."""
