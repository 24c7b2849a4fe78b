"""Tasks: detection of objects, and segmentation."""
