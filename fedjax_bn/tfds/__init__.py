"""Builders for tensorflow-datasets: PACS, VLCS, OfficeHome and Office-Caltech10.

    python -m fedjax_bn.tfds pacs FOLDER_OF_THE_IMAGES [--data_dir=DIR]

prepares a copy in the format array_record, without TensorFlow. Any project can read it:

    import tensorflow_datasets as tfds
    builder = tfds.builder_from_directory("DIR/pacs/1.0.0")
    photo = builder.as_data_source("photo")     # photo[0]: image, label, name, part

and `fedjax_bn.data.sets.tfds_source` reads it here. After `import fedjax_bn.tfds.builders`,
`tfds.builder("pacs")` and `tfds.data_source("pacs")` find it by name.
"""
