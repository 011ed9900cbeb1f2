"""HTTP code shared by the routes of all APIs."""
