"""The plugins that come with the framework, each one optional behaviour; installed as ``pipeline_plugins``."""
