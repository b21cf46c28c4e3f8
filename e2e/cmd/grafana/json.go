package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
)

// pages is where the documentation of the metrics stands.
const pages = "https://github.com/kvscout/kvscout/blob/main/docs/OPERATIONS.md"

// columns of Grafana's grid; a panel is a third or half of them wide.
const columns = 24

// dashboard is one page of panels, in rows.
type dashboard struct {
	uid, title, about string
	rows              []row
}

type row struct {
	title  string
	panels []panel
}

// panel is one picture.
type panel struct {
	title, about string
	// unit as Grafana names it.
	unit string
	// see is the section of docs/OPERATIONS.md that explains it.
	see string
	// number: the last value in large figures, in place of a graph.
	number bool
	// stacked graphs lie on each other; full ones end at 1.
	stacked, full bool
	// steps of colour from a value on, above green.
	steps   []step
	queries []query
}

type step struct {
	from   float64
	colour string
}

// query is PromQL. $$ stands for the schedulers that are chosen above the page,
// among other labels of a selector.
type query struct{ expr, legend string }

func (q query) promql() string { return strings.ReplaceAll(q.expr, "$$", `instance=~"$scheduler"`) }

type object = map[string]any

// source is what queries are sent to, as chosen above the page.
var source = object{"type": "prometheus", "uid": "${datasource}"}

func (d *dashboard) json() []byte {
	var panels []object
	id, y := 0, 0
	place := func(p object, x, y, w, h int) {
		id++
		p["id"], p["gridPos"] = id, object{"x": x, "y": y, "w": w, "h": h}
		panels = append(panels, p)
	}
	for _, r := range d.rows {
		place(object{"type": "row", "title": r.title, "collapsed": false, "panels": []any{}}, 0, y, columns, 1)
		y++
		width := columns / len(r.panels)
		height := 8
		if r.panels[0].number {
			height = 4
		}
		for i := range r.panels {
			place(r.panels[i].object(), i*width, y, width, height)
		}
		y += height
	}
	var links []object
	for i := range dashboards {
		if other := &dashboards[i]; other.uid != d.uid {
			links = append(links, object{"type": "link", "title": other.title, "url": "/d/" + other.uid, "keepTime": true, "includeVars": true})
		}
	}
	links = append(links, object{"type": "link", "title": "Operations", "url": pages, "targetBlank": true})
	page := object{
		"uid": d.uid, "title": d.title, "description": d.about, "tags": []string{"kvscout"},
		"schemaVersion": 39, "version": 1, "editable": true, "refresh": "10s", "timezone": "",
		"time": object{"from": "now-1h", "to": "now"}, "links": links, "panels": panels,
		"templating": object{"list": []object{
			{"type": "datasource", "name": "datasource", "label": "Data source", "query": "prometheus"},
			{
				"type": "query", "name": "scheduler", "label": "Scheduler", "datasource": source, "multi": true, "includeAll": true, "allValue": ".*",
				"query": object{"query": "label_values(kvscout_scheduler_ready, instance)", "refId": "scheduler"}, "refresh": 2, "sort": 1,
				"current": object{"text": "All", "value": "$__all"},
			},
		}},
	}
	var text bytes.Buffer
	encoder := json.NewEncoder(&text)
	encoder.SetEscapeHTML(false)
	encoder.SetIndent("", "  ")
	if err := encoder.Encode(page); err != nil {
		panic(err) // maps of strings and numbers
	}
	return text.Bytes()
}

func (p *panel) object() object {
	steps := []object{{"color": "green", "value": nil}}
	for _, s := range p.steps {
		steps = append(steps, object{"color": s.colour, "value": s.from})
	}
	defaults := object{"unit": p.unit, "min": 0, "thresholds": object{"mode": "absolute", "steps": steps}}
	if p.full || p.unit == "percentunit" {
		defaults["max"] = 1
	}
	var targets []object
	for i, q := range p.queries {
		targets = append(targets, object{"refId": string(rune('A' + i)), "datasource": source, "expr": q.promql(), "legendFormat": q.legend})
	}
	o := object{
		"title": p.title, "description": p.about, "datasource": source, "targets": targets,
		"links": []object{{"title": "What it means", "url": fmt.Sprintf("%s#%s", pages, p.see), "targetBlank": true}},
	}
	if p.number {
		o["type"] = "stat"
		o["options"] = object{"reduceOptions": object{"calcs": []string{"lastNotNull"}}, "colorMode": "value", "graphMode": "area"}
	} else {
		o["type"] = "timeseries"
		o["options"] = object{"legend": object{"displayMode": "list", "placement": "bottom"}, "tooltip": object{"mode": "multi", "sort": "desc"}}
		custom := object{"fillOpacity": 10, "showPoints": "never"}
		if p.stacked {
			custom["stacking"] = object{"mode": "normal"}
			custom["fillOpacity"] = 40
		}
		if len(p.steps) > 0 {
			custom["thresholdsStyle"] = object{"mode": "line"}
		}
		defaults["custom"] = custom
	}
	o["fieldConfig"] = object{"defaults": defaults, "overrides": []any{}}
	return o
}
