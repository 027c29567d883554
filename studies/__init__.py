"""The paper's tables and figures, each study a list of rows over the library's public interface."""
