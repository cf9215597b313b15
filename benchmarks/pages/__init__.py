"""Results for readers: tables, pictures, the report, the documented page."""
