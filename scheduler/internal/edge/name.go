package edge

import "unicode/utf8"

// maxName is how many bytes the name of a request may have in the API.
const maxName = 128

// Name of a request, as its client or the proxies before it call it; empty: it has
// none, or none that the API takes. Two requests may have the same.
func Name(headers map[string]string) string {
	if name := headers["x-request-id"]; len(name) <= maxName && utf8.ValidString(name) {
		return name
	}
	return ""
}
