"""Reads images with boxes in the forms of COCO and YOLO, as square images and labels.

`launch/convert` makes COCO's form of Pascal VOC, BDD100K, Cityscapes and Mapillary Vistas.
"""
