"""Images with boxes, in the forms in which they are published: to squares of pixels and labels."""
