"""What somebody who operates the proxy sees, is told and may change."""
