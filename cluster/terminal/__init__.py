"""What commands show: tables, progress bars, texts of others without their escape sequences, and pages with charts."""
