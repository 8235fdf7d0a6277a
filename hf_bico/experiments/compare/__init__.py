"""Methods side by side: the measured numbers as data, the log that they are kept in, and how they are written."""
