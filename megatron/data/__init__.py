"""Token datasets on disk, the order in which a run reads them, and batches."""
