"""Reads images with boxes in the forms of COCO and YOLO; errors are those of `data.sets`."""
