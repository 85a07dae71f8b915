"""Files of samples in slots: text, delimited text and Parquet, the formats of recommenders."""
