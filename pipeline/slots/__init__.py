"""Files of samples in slots: text, delimited text and Parquet, as recommenders have them."""
