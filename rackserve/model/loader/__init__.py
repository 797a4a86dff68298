"""Model files on disk, read into tensors or into a Hugging Face folder.

Owns file formats and their errors. Must not know how a model computes, nor fetch anything.
Law: a file that is missing, truncated or misshapen ends in a FileFormatError that names file, tensor and shapes.
"""
