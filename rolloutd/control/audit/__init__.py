"""The audit: its pages, its verification, its mismatches."""
