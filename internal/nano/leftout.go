//go:build nonano

package nano

import "embed"

var files embed.FS
