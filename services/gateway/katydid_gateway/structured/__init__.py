"""What an answer must look like, as one constraint that an engine enforces while it samples."""
